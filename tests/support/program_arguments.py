"""The dataclass of each program's arguments, by the words after ``python`` that start it."""

from typing import Any

from fabric_train.arguments import TrainArguments
from fabric_train.doctor import DoctorArguments
from fabric_train.evaluation.arguments import EvaluateArguments
from fabric_train.export.publish import PublishArguments
from fabric_train.inference.arguments import GenerateArguments
from fabric_train.merge_models.__main__ import MergeModelsArguments
from fabric_train.programs.convert_to_hf import ConvertArguments
from fabric_train.programs.download_model import DownloadArguments
from fabric_train.replay import ReplayArguments
from fabric_train.report.__main__ import ReportArguments
from fabric_train.runs import RunsArguments
from fabric_train.tokenization.arguments import TokenizeArguments
from fabric_train.tokenization.inspect.__main__ import InspectArguments
from fabric_train.tokenization.merge import MergeArguments
from fabric_train.trace.__main__ import TraceArguments
from fabric_train.translate.__main__ import TranslateArguments
from fabric_train.vocabulary.__main__ import VocabularyExtendArguments, VocabularyReportArguments

PROGRAM_ARGUMENTS: dict[str, Any] = {
    "-m fabric_train": TrainArguments,
    "tokenize_dataset.py": TokenizeArguments,
    "convert_to_hf.py": ConvertArguments,
    "generate.py": GenerateArguments,
    "evaluate.py": EvaluateArguments,
    "download_model.py": DownloadArguments,
    "-m fabric_train.merge_models": MergeModelsArguments,
    "-m fabric_train.tokenization.inspect": InspectArguments,
    "-m fabric_train.tokenization.merge": MergeArguments,
    "-m fabric_train.export.publish": PublishArguments,
    "-m fabric_train.doctor": DoctorArguments,
    "-m fabric_train.replay": ReplayArguments,
    "-m fabric_train.report": ReportArguments,
    "-m fabric_train.runs": RunsArguments,
    "-m fabric_train.trace": TraceArguments,
    "-m fabric_train.translate": TranslateArguments,
    "-m fabric_train.vocabulary report": VocabularyReportArguments,
    "-m fabric_train.vocabulary extend": VocabularyExtendArguments,
}
