"""Templates of the model repository: <model>/config.pbtxt and <model>/1/model.py. Read as files, never imported."""
