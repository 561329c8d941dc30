"""Floor 2: what we know of models: safetensors checkpoints, transformers architectures, calibration text."""
