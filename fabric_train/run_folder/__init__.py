"""A run's folder as others read it: its configuration, metrics, log, samples, times and checkpoints, all without torch.

- ``run_folder.py`` is strict: a file that is damaged or missing is an InputError or an OSError when it is first read.
  The report, the trace, ``load_run`` and the watcher of a run use it.
- ``run_summary.py`` is tolerant: a damaged file is a named fault of the result, and the rest is still there. It reads
  only the ends of long files, and imports neither pydantic nor numpy, for lists of many runs.

The formats of metrics.csv, times.jsonl and samples.jsonl are read next to the code that writes them, in ``training/``,
and trainer.json in ``checkpoint/``.
"""
