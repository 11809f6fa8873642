"""Export a checkpoint to a verified Hugging Face folder and to the hub, and download from the hub to a folder.

Open ``convert.py`` first: ``convert_to_hf.py`` runs it. ``hub.py`` pushes and downloads. ``model_card.py`` writes the
card, whose text is in ``templates/``.
"""
