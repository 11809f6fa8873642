"""From a checkpoint to a verified Hugging Face folder and to the hub, and from the hub to a folder.

Read ``convert.py`` first: ``convert_to_hf.py`` runs it. ``model_download.py`` belongs to ``download_model.py``.
"""
