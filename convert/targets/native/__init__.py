"""Our own target: the source family's transformers model with latent attention in place of its own."""
