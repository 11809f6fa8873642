"""Read a run's folder without torch: its configuration, metrics, log, samples, times and checkpoints.

- ``run_folder.py`` is strict: a file that is damaged or missing is an InputError or an OSError when it is first read.
  The report, the trace, ``load_run`` and the watcher of a run use it.
- ``run_summary.py`` is tolerant: it names a damaged file and returns what it can read from the others. It reads
  only the ends of long files, and imports neither pydantic nor numpy, for lists of many runs.

The formats of metrics.csv, times.jsonl and samples.jsonl are read next to the code that writes them, in ``training/``,
and trainer.json in ``checkpoint/``.
"""
