"""The algorithm: grading, advantages, collation, losses and the loops that join them."""
