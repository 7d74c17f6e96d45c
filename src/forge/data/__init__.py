"""[1] Data: where models, questions and scores come from."""
