"""From a checkpoint to a verified Hugging Face folder, and on to the hub. What ``convert_to_hf.py`` drives."""
