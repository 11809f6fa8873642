"""List the dataclass of each program's arguments, by the name that ``fabric-train`` has for the program."""

from typing import Any

from fabric_train.arguments import TrainArguments
from fabric_train.doctor import DoctorArguments
from fabric_train.evaluation.arguments import EvaluateArguments
from fabric_train.export.publish import PublishArguments
from fabric_train.inference.arguments import GenerateArguments
from fabric_train.inspection.__main__ import InspectArguments
from fabric_train.launch_files import LaunchFilesArguments
from fabric_train.merge_models.__main__ import MergeModelsArguments
from fabric_train.programs.convert_to_hf import ConvertArguments
from fabric_train.programs.download_model import DownloadArguments
from fabric_train.replay import ReplayArguments
from fabric_train.report.__main__ import ReportArguments
from fabric_train.rollouts.__main__ import RolloutsArguments
from fabric_train.runs import RunsArguments
from fabric_train.sample_data.__main__ import SampleDataArguments
from fabric_train.teacher_states.__main__ import TeachArguments
from fabric_train.tokenization.arguments import TokenizeArguments
from fabric_train.tokenization.merge import MergeArguments
from fabric_train.trace.__main__ import TraceArguments
from fabric_train.translate.__main__ import TranslateArguments
from fabric_train.vocabulary.__main__ import VocabularyExtendArguments, VocabularyReportArguments

ALL_ARGUMENTS: dict[str, Any] = {
    "tokenize": TokenizeArguments,
    "inspect": InspectArguments,
    "merge": MergeArguments,
    "publish": PublishArguments,
    "vocabulary report": VocabularyReportArguments,
    "vocabulary extend": VocabularyExtendArguments,
    "teach": TeachArguments,
    "train": TrainArguments,
    "runs": RunsArguments,
    "trace": TraceArguments,
    "replay": ReplayArguments,
    "report": ReportArguments,
    "rollouts": RolloutsArguments,
    "convert": ConvertArguments,
    "merge_models": MergeModelsArguments,
    "generate": GenerateArguments,
    "evaluate": EvaluateArguments,
    "download": DownloadArguments,
    "doctor": DoctorArguments,
    "translate": TranslateArguments,
    "sample_data": SampleDataArguments,
    "launch_files": LaunchFilesArguments,
}
