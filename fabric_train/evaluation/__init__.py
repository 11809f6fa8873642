"""Compare models by their loss on texts, or evaluate models and checkpoints on tasks; ``evaluate.py`` does both.

For losses, open ``compare_models.py`` first. ``texts.py`` has the documents and their windows, ``models.py`` finds the
models and computes losses, ``training/statistics.py`` computes their intervals, ``loss_table.py`` writes them, and
``loss_changes.py`` finds where tokens got better and worse. ``pairs.py`` evaluates preference pairs. For tasks, open
``watch.py`` first. ``task_file.py`` reads the tasks, ``lm_eval_worker.py`` evaluates a model on them, and ``scores.py``
has the results.
"""
