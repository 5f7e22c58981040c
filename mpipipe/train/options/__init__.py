"""The options of a training, by what they are about."""
