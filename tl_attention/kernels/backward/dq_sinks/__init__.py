"""Ways of dq from the products of a key tile to its tensor."""
