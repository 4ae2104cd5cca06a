"""Loading: views, plans, verified transfers."""
