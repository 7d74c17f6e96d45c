"""forge: actor-based RL post-training for PyTorch; the algorithm is all you see."""
