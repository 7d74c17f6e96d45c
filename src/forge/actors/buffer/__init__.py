"""[4] The parts of the replay buffer."""
