"""Programs (train, sample, evaluate), their gin configs and the data they read."""
