"""Following instructions on form, the way IFEval judges it: strict, or loose over a few readings of the text."""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Callable, Mapping, Sequence
from difflib import get_close_matches
from typing import Any

from headway.errors import ConfigError, RewardError
from headway.rewards.function_reward import InlineReward

Instruction = tuple[str, Mapping[str, Any]]


def make_ifeval_reward(
    *,
    checks: Sequence[Mapping[str, Any]] = (),
    instructions: str = "instruction_id_list",
    parameters: str = "kwargs",
    loose: bool = False,
    partial: bool = False,
) -> InlineReward:
    """1 where the text follows every instruction, else 0; the share that it follows with `partial`.

    Instructions come from the task, under `instructions` and `parameters` as in IFEval's data, and from `checks`: a
    list of `{id: NAME, parameter: value, …}` for every task. `loose` also accepts the text without its first line,
    its last line, its asterisks, or any of these together.
    """
    common = [_from_config(entry) for entry in checks]

    def judge(text: str, data: Mapping[str, Any]) -> float:
        asked = [*common, *_from_data(data, instructions, parameters)]
        if not asked:
            raise RewardError(f"no instruction to check: neither `checks` nor the task's {instructions!r} has one")
        readings = make_loose_readings(text) if loose else [text]
        followed = [any(reading.strip() and _holds(one, reading) for reading in readings) for one in asked]
        return sum(followed) / len(followed) if partial else float(all(followed))

    return InlineReward("ifeval", judge)


def make_loose_readings(text: str) -> list[str]:
    """The text as it is, and without what models like to put around an answer."""
    lines = text.split("\n")
    readings = [text, "\n".join(lines[1:]), "\n".join(lines[:-1]), "\n".join(lines[1:-1])]
    readings = [reading.strip() for reading in readings]
    return [text, *readings, *(reading.replace("*", "") for reading in readings)]


def _holds(instruction: Instruction, text: str) -> bool:
    name, given = instruction
    try:
        return IFEVAL_CHECKS[name](text, **given)
    except (TypeError, ValueError, AttributeError) as error:
        raise RewardError(f"{name} cannot be checked with {dict(given)}: {error}") from error


def _from_data(data: Mapping[str, Any], instructions: str, parameters: str) -> list[Instruction]:
    names, given = data.get(instructions) or [], data.get(parameters) or []
    if len(given) not in (0, len(names)):
        raise RewardError(f"the task has {len(names)} instructions and {len(given)} sets of parameters")
    for name in names:
        if name not in IFEVAL_CHECKS:
            raise RewardError(f"no check for the instruction {name!r}{_meant(name)}")
    # IFEval's data has a null for every parameter of every other instruction
    sets = [{key: value for key, value in (one or {}).items() if value is not None} for one in given]
    return list(zip(names, sets or [{}] * len(names), strict=True))


def _from_config(entry: Mapping[str, Any]) -> Instruction:
    given = dict(entry)
    name = given.pop("id", None)
    if name not in IFEVAL_CHECKS:
        raise ConfigError(
            f"is no check{_meant(str(name))}", key="checks", value=name, hint=", ".join(sorted(IFEVAL_CHECKS))
        )
    try:
        inspect.signature(IFEVAL_CHECKS[name]).bind("", **given)
    except TypeError as error:
        raise ConfigError(f"{name}: {error}", key="checks", value=dict(entry)) from error
    return name, given


def _meant(name: str) -> str:
    close = get_close_matches(name, IFEVAL_CHECKS, n=1)
    return f", did you mean {close[0]!r}?" if close else ""


CheckFunction = Callable[..., bool]
IFEVAL_CHECKS: dict[str, CheckFunction] = {}

_ABBREVIATIONS = re.compile(r"\b(?:Mr|Mrs|Ms|Dr|Prof|St|Sr|Jr|vs|etc|e\.g|i\.e|a\.m|p\.m|No|Fig)\.", re.IGNORECASE)
_SENTENCE_END = re.compile(r"[.!?]+[\"')\]]*(?=\s|$)")
_CONSTRAINED = ("My answer is yes.", "My answer is no.", "My answer is maybe.")
_QUOTES = {'"': '"', "\N{LEFT DOUBLE QUOTATION MARK}": "\N{RIGHT DOUBLE QUOTATION MARK}"}


def register_check(name: str) -> Callable[[CheckFunction], CheckFunction]:
    """Register a check under IFEval's name for it."""

    def register(function: CheckFunction) -> CheckFunction:
        IFEVAL_CHECKS[name] = function
        return function

    return register


def compare_count(count: int, relation: str, wanted: int) -> bool:
    """IFEval's two relations, and the plain ones."""
    if relation == "at least":
        return count >= wanted
    if relation == "less than":
        return count < wanted
    if relation == "at most":
        return count <= wanted
    if relation == "exactly":
        return count == wanted
    raise ValueError(f"relation {relation!r} is none of: at least, less than, at most, exactly")


def count_occurrences(text: str, word: str) -> int:
    """How often `word` stands in `text` as a word (or words) of its own, whatever its case."""
    return len(re.findall(rf"(?<!\w){re.escape(word)}(?!\w)", text, re.IGNORECASE))


def count_sentences(text: str) -> int:
    """Sentences: ends of them, and a last one without."""
    text = re.sub(r"(?<=\d)\.(?=\d)", "", _ABBREVIATIONS.sub("x", text)).strip()
    ends = list(_SENTENCE_END.finditer(text))
    rest = text[ends[-1].end() :] if ends else text
    return len(ends) + bool(rest.strip())


# -- length


@register_check("length_constraints:number_words")
def number_words(text: str, *, num_words: int, relation: str = "at least") -> bool:
    return compare_count(len(re.findall(r"\w+(?:['’-]\w+)*", text)), relation, num_words)


@register_check("length_constraints:number_sentences")
def number_sentences(text: str, *, num_sentences: int, relation: str = "at least") -> bool:
    return compare_count(count_sentences(text), relation, num_sentences)


@register_check("length_constraints:number_paragraphs")
def number_paragraphs(text: str, *, num_paragraphs: int) -> bool:
    """Paragraphs are divided by `***`; empty ones may stand at either end only."""
    parts = [part.strip() for part in text.split("***")]
    inner = parts[1 if not parts[0] else 0 : -1 if not parts[-1] else None]
    return all(inner) and len(inner) == num_paragraphs


@register_check("length_constraints:nth_paragraph_first_word")
def nth_paragraph_first_word(text: str, *, num_paragraphs: int, nth_paragraph: int, first_word: str) -> bool:
    """Paragraphs are divided by blank lines."""
    parts = [part.strip() for part in re.split(r"\n\s*\n", text) if part.strip()]
    if len(parts) != num_paragraphs or not 1 <= nth_paragraph <= len(parts):
        return False
    first = parts[nth_paragraph - 1].split()[0].strip("\"'.,?!*").casefold()
    return first == first_word.casefold()


# -- words


@register_check("keywords:existence")
def keywords_exist(text: str, *, keywords: Sequence[str]) -> bool:
    return all(count_occurrences(text, word) for word in keywords)


@register_check("keywords:forbidden_words")
def keywords_absent(text: str, *, forbidden_words: Sequence[str]) -> bool:
    return not any(count_occurrences(text, word) for word in forbidden_words)


@register_check("keywords:frequency")
def keyword_frequency(text: str, *, keyword: str, frequency: int, relation: str = "at least") -> bool:
    return compare_count(count_occurrences(text, keyword), relation, frequency)


@register_check("keywords:letter_frequency")
def letter_frequency(text: str, *, letter: str, let_frequency: int, let_relation: str = "at least") -> bool:
    return compare_count(text.casefold().count(letter.casefold()), let_relation, let_frequency)


# -- case and punctuation


@register_check("change_case:english_capital")
def all_capital(text: str) -> bool:
    return text.isupper()


@register_check("change_case:english_lowercase")
def all_lowercase(text: str) -> bool:
    return text.islower()


@register_check("change_case:capital_word_frequency")
def capital_words(text: str, *, capital_frequency: int, capital_relation: str = "at least") -> bool:
    return compare_count(sum(word.isupper() for word in re.findall(r"\w+", text)), capital_relation, capital_frequency)


@register_check("punctuation:no_comma")
def no_comma(text: str) -> bool:
    return not any(comma in text for comma in (",", "，", "、"))


# -- form


@register_check("detectable_format:number_bullet_lists")
def number_bullets(text: str, *, num_bullets: int) -> bool:
    return len(re.findall(r"^[ \t]*(?:\*(?!\*)|-(?!-)|•)[ \t]*\S", text, re.MULTILINE)) == num_bullets


@register_check("detectable_format:number_highlighted_sections")
def number_highlights(text: str, *, num_highlights: int) -> bool:
    double = [found for found in re.findall(r"\*\*([^*\n]+)\*\*", text) if found.strip()]
    single = [found for found in re.findall(r"(?<!\*)\*([^*\n]+)\*(?!\*)", text) if found.strip()]
    return len(double) + len(single) >= num_highlights


@register_check("detectable_format:multiple_sections")
def multiple_sections(text: str, *, section_spliter: str, num_sections: int) -> bool:
    return len(re.findall(rf"{re.escape(section_spliter.strip())}\s+\d+", text)) >= num_sections


@register_check("detectable_format:json_format")
def json_format(text: str) -> bool:
    """Nothing but JSON, in a code fence or not."""
    fenced = re.fullmatch(r"```(?:json)?\s*\n?(.*?)\n?\s*```", text.strip(), re.DOTALL | re.IGNORECASE)
    try:
        json.loads(fenced.group(1) if fenced else text)
    except (ValueError, RecursionError):
        return False
    return True


@register_check("detectable_format:title")
def title(text: str) -> bool:
    return any(found.strip("<> ") for found in re.findall(r"<<[^<>\n]+>>", text))


@register_check("detectable_format:constrained_response")
def constrained_response(text: str) -> bool:
    return any(answer in text for answer in _CONSTRAINED)


@register_check("detectable_content:number_placeholders")
def number_placeholders(text: str, *, num_placeholders: int) -> bool:
    return len(re.findall(r"\[[^\[\]]+\]", text)) >= num_placeholders


@register_check("detectable_content:postscript")
def postscript(text: str, *, postscript_marker: str = "P.S.") -> bool:
    """A line begins with the marker, dots and blanks in it as you like, and something follows."""
    letters = r"\.?\s?".join(re.escape(letter) for letter in re.sub(r"[.\s]", "", postscript_marker))
    return re.search(rf"^[ \t]*{letters}\b\.?[ \t:]*[^\s.:]", text, re.MULTILINE | re.IGNORECASE) is not None


# -- start, end, combination


@register_check("startend:end_checker")
def ends_with(text: str, *, end_phrase: str) -> bool:
    return text.strip().strip('"').casefold().endswith(end_phrase.strip().casefold())


@register_check("startend:start_checker")
def starts_with(text: str, *, start_phrase: str) -> bool:
    return text.strip().strip('"').casefold().startswith(start_phrase.strip().casefold())


@register_check("startend:quotation")
def quotation(text: str) -> bool:
    text = text.strip()
    return len(text) > 1 and _QUOTES.get(text[0]) == text[-1]


@register_check("combination:two_responses")
def two_responses(text: str) -> bool:
    parts = [part.strip() for part in text.split("******")]
    parts = [part for place, part in enumerate(parts) if part or 0 < place < len(parts) - 1]
    return len(parts) == 2 and all(parts) and parts[0] != parts[1]


@register_check("combination:repeat_prompt")
def repeat_prompt(text: str, *, prompt_to_repeat: str) -> bool:
    return text.strip().casefold().startswith(prompt_to_repeat.strip().casefold())
