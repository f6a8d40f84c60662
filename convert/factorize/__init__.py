"""From statistics to latent attention."""
