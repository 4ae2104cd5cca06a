"""Model weights in files of this package, of Hugging Face and of torch."""
