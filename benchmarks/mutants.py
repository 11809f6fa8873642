"""List the defects that mutmut's operators can plant in a module, without those in texts and annotations."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import libcst

# names of functions and methods whose arguments are texts for people
_MESSAGES = {"print", "info", "warning", "warn", "error", "debug", "note", "_note", "report", "log", "check_message"}


@dataclass(frozen=True)
class Mutant:
    """A defect: ``before`` at an offset of the source, in characters, becomes ``after``; ``operator`` is its kind."""

    offset: int
    line: int
    before: str
    after: str
    operator: str

    def plant(self, source: str) -> str:
        """Return the source with the defect.

        Raises:
            ValueError: the source is another one.
        """
        end = self.offset + len(self.before)
        if source[self.offset : end] != self.before:
            raise ValueError(f"line {self.line} is not {self.before!r}")
        return source[: self.offset] + self.after + source[end:]


def mutants_by_place(source: str) -> list[list[Mutant]]:
    """Return the defects of each place of a module, in the order of the source; some may not compile.

    A place is a node of the syntax: a call, a comparison, a number. mutmut's operators that replace a value by None are
    left out, because nearly all of their defects end the program at once. An operator is added: a call whose result is
    not used is left out. Not changed are texts, docstrings, comments, annotations, decorators, assertions, raised
    errors, and imports.
    """
    import libcst as cst
    from libcst import metadata

    wrapper = metadata.MetadataWrapper(cst.parse_module(source), unsafe_skip_copy=True)
    spans = wrapper.resolve(metadata.ByteSpanPositionProvider)
    content = source.encode()
    places = []
    for node in _nodes(wrapper.module):
        found = []
        for operator, replacement in _replacements(node):
            span = spans[node]
            before = content[span.start : span.start + span.length].decode()
            offset = len(content[: span.start].decode())
            # a node's code may begin or end with the white space and parentheses around it, its span does not
            whole, new = (wrapper.module.code_for_node(each) for each in (node, replacement))
            prefix, _, suffix = whole.partition(before)
            after = new.removeprefix(prefix).removesuffix(suffix)
            if after != before:
                found.append(Mutant(offset, source.count("\n", 0, offset) + 1, before, after, operator))
        if found:
            places.append(found)
    return places


def _nodes(node: "libcst.CSTNode") -> Iterator["libcst.CSTNode"]:
    """Yield the nodes that may be changed, from the top."""
    import libcst as cst

    yield node
    for child in node.children:
        if isinstance(
            child, (cst.Annotation, cst.Decorator, cst.Raise, cst.Assert, cst.Import, cst.ImportFrom, cst.Parameters)
        ):
            if isinstance(child, cst.Parameters):
                for parameter in (*child.params, *child.kwonly_params):
                    if parameter.default is not None:
                        yield from _nodes(parameter.default)
            continue
        if _is_for_people(child) or _is_type_checking(child):
            continue
        yield from _nodes(child)


def _is_for_people(node: "libcst.CSTNode") -> bool:
    import libcst as cst

    if isinstance(node, cst.BaseString):  # with the values in it
        return True
    if isinstance(node, cst.Call):
        called = node.func.attr if isinstance(node.func, cst.Attribute) else node.func
        name = called.value if isinstance(called, cst.Name) else ""
        return name in _MESSAGES or name.endswith("Error")
    return False


def compiles(source: str) -> bool:
    """Return whether Python accepts the source."""
    try:
        compile(source, "", "exec", dont_inherit=True)
    except (SyntaxError, ValueError):
        return False
    return True


def _is_type_checking(node: "libcst.CSTNode") -> bool:
    import libcst as cst

    return isinstance(node, cst.If) and isinstance(node.test, cst.Name) and node.test.value == "TYPE_CHECKING"


def _replacements(node: "libcst.CSTNode") -> Iterator[tuple[str, "libcst.CSTNode"]]:
    import libcst as cst
    from mutmut.mutation import mutators

    left_out = {mutators.operator_assignment, mutators.operator_lambda, mutators.operator_string}
    for kind, operator in mutators.mutation_operators:
        if isinstance(node, kind) and operator not in left_out:
            for replacement in operator(node):
                if operator is not mutators.operator_arg_removal or _lacks_a_keyword(node, replacement):
                    yield operator.__name__.removeprefix("operator_"), replacement
    if isinstance(node, cst.Expr) and isinstance(node.value, cst.Call) and not _is_for_people(node.value):
        yield "call_left_out", cst.Pass()


def _lacks_a_keyword(call: Any, replacement: Any) -> bool:
    """Return whether a call has one keyword less; mutmut also leaves out positions, and replaces by None."""
    keywords, left = ({each.keyword.value for each in one.args if each.keyword} for one in (call, replacement))
    return bool(keywords - left - {"strict", "encoding"})  # of zip, and of files: both change nothing here
