"""Arguments that several programs take, and checks of their values."""

import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

_BRANCH = r"refs/pr/[1-9][0-9]{0,8}|(?!refs/)(?!.*\.\.)[A-Za-z0-9_][A-Za-z0-9_.-]*(/[A-Za-z0-9_][A-Za-z0-9_.-]*)*"
REPOSITORY = r"[A-Za-z0-9_.-]+/[A-Za-z0-9_.-]+"
"""Pattern of a name on the Hugging Face hub, OWNER/NAME."""

_ISO_639_1 = """
aa ab ae af ak am an ar as av ay az ba be bg bi bm bn bo br bs ca ce ch co cr cs cu cv cy da de dv dz ee el en eo es
et eu fa ff fi fj fo fr fy ga gd gl gn gu gv ha he hi ho hr ht hu hy hz ia id ie ig ii ik io is it iu ja jv ka kg ki
kj kk kl km kn ko kr ks ku kv kw ky la lb lg li ln lo lt lu lv mg mh mi mk ml mn mr ms mt my na nb nd ne ng nl nn no
nr nv ny oc oj om or os pa pi pl ps pt qu rm rn ro ru rw sa sc sd se sg si sk sl sm sn so sq sr ss st su sv sw ta te
tg th ti tk tl tn to tr ts tt tw ty ug uk ur uz ve vi vo wa wo xh yi yo za zh zu
"""


@dataclass(frozen=True, kw_only=True)
class PushArguments:
    """Card and publication on the Hugging Face hub"""

    push_to_hub: str | None = None
    """Push the finished folder to the repository OWNER/NAME. If --output_dir has it already, it is only pushed."""
    private: bool = True
    """Make a repository that the push creates private."""
    revision: str | None = None
    """Branch to push to, created if it is missing; refs/pr/N is an open pull request. Default: main."""
    create_pr: bool = False
    """Open a pull request instead of changing main."""
    commit_message: str | None = None
    """Message of the commit, and title of the pull request."""
    license: str | None = None
    """For the card: the licence's identifier on the hub, such as apache-2.0; default of a model: its base model's."""

    def faults(self) -> list[str]:
        """Return names that the hub refuses, and options of a push without one."""
        faults = []
        if self.license is not None and not re.fullmatch(r"[a-z0-9][a-z0-9.+-]*", self.license):
            faults.append(f"--license: expected an identifier of the hub such as apache-2.0, got {self.license!r}")
        if self.license == "other":
            faults.append("--license other needs a name and a text: leave it out, to take those of the base model")
        if self.push_to_hub is not None and not re.fullmatch(REPOSITORY, self.push_to_hub):
            faults.append(f"--push_to_hub: expected OWNER/NAME, got {self.push_to_hub!r}")
        if self.revision is not None and not re.fullmatch(_BRANCH, self.revision):
            faults.append(f"--revision: expected a branch such as step-500, or refs/pr/N, got {self.revision!r}")
        if self.create_pr and self.revision is not None:
            faults.append("--create_pr true opens a pull request for main: leave out --revision")
        if self.push_to_hub is None:
            given = {"revision": self.revision, "create_pr": self.create_pr, "commit_message": self.commit_message}
            faults += [f"--{name} needs --push_to_hub OWNER/NAME" for name, value in given.items() if value]
        return faults


def not_language_codes(option: str, codes: Sequence[str] | None) -> list[str]:
    """Return a fault for each code that the hub cannot take: of ISO 639-1, three letters, or a special value.

    There are thousands of codes with three letters, so only their form is checked.
    """
    known = {*_ISO_639_1.split(), "code", "multilingual"}
    return [
        f"{option}: expected ISO 639 codes such as en, es or ca, got {code!r}"
        for code in codes or ()
        if code not in known and not re.fullmatch(r"[a-z]{3}", code)
    ]


def given_twice(folders: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Yield each folder that is given again, also by another path, with the fault; a folder given thrice, twice."""
    paths = [os.path.realpath(os.path.expanduser(name)) for name in folders]
    for number, name in enumerate(folders):
        first = folders[paths.index(paths[number])]
        if paths.index(paths[number]) < number:
            yield first, f"{first} is given twice{'' if name == first else f', also as {name}'}; give it once"


def range_of_steps(text: str) -> tuple[int, int] | None:
    """Return first and last step of a text such as 10:12, None if it is no such text."""
    found = re.fullmatch(r"([1-9][0-9]{0,8}):([1-9][0-9]{0,8})", text)
    steps = (int(found[1]), int(found[2])) if found else None
    return steps if steps and steps[0] <= steps[1] else None
