"""Compare models by their loss on texts, or evaluate the checkpoints of a run on tasks; ``evaluate.py`` runs both.

For losses, open ``compare_models.py`` first: ``texts.py`` has the documents, ``texts.py`` their tokens and
windows, ``token_losses.py`` a model's losses, ``bootstrap.py`` their intervals. ``loss_changes.py`` finds where tokens
got better and worse. For tasks, open ``watch.py`` first: ``tasks_file.py`` says which, and ``lm_eval_worker.py``
evaluates a model on them.
"""
