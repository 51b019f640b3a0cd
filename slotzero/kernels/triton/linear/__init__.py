"""Matrix products, and the operations fused into them."""
