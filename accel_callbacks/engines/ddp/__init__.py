"""Each rank has the whole model, and gradients are averaged."""
