"""Matrix products and what is fused into them."""
