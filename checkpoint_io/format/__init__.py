"""The format: manifest, trees, tensor files, and how damaged or hostile ones are refused."""
