"""Following instructions on form, as IFEval judges it: strict, or loose over a few readings of the text.

Each check has IFEval's name. It takes the text and its own parameters by keyword, as IFEval's data spells them, and
runs in time linear in the text. The check of a response's language is missing: it needs a model of its own.

Some checks are stricter than IFEval's where a text could follow them without saying anything: invisible characters are
dropped first, and a word, sentence, section, placeholder or quotation needs a letter, a digit or a symbol.
"""

import inspect
import json
import operator
import re
import unicodedata
from collections.abc import Callable, Mapping, Sequence
from importlib.resources import files
from typing import Any

import yaml

from headway.errors import ConfigError, RewardError, suggest_close_match
from headway.rewards.scoring_functions import BuiltInReward
from headway.rewards.text_rewards import has_content, penalise_repetition

Instruction = tuple[str, Mapping[str, Any]]
"""The name of a check and its parameters."""
CheckFunction = Callable[..., bool]

_ABBREVIATIONS = re.compile(r"\b(?:Mr|Mrs|Ms|Dr|Prof|St|Sr|Jr|vs|etc|e\.g|i\.e|a\.m|p\.m|No|Fig)\.", re.IGNORECASE)
_SENTENCE_END = re.compile(r"[.!?]+[\"')\]]*(?=\s|$)")
_RELATIONS = {"at least": operator.ge, "less than": operator.lt, "at most": operator.le, "exactly": operator.eq}
_CONSTRAINED_ANSWERS = ("My answer is yes.", "My answer is no.", "My answer is maybe.")
_QUOTES = {'"': '"', "\N{LEFT DOUBLE QUOTATION MARK}": "\N{RIGHT DOUBLE QUOTATION MARK}"}


def make_ifeval_reward(
    *,
    checks: Sequence[Mapping[str, Any]] = (),
    instructions: str = "instruction_id_list",
    parameters: str = "kwargs",
    loose: bool = False,
    partial: bool = False,
    answer: str = "ground_truth",
    repetition_penalty: float = 0.0,
) -> BuiltInReward:
    """Score 1 if the text follows every instruction, else 0; with `partial`, the share that it follows.

    Instructions come from the task, under `instructions` and `parameters` as in IFEval's data, or under `answer` as a
    constraint of open-instruct (`func_name`), as ROLL's data have it, which does not count what stands before
    `</think>`; and from `checks`: a list of `{id: NAME, parameter: value, …}` for every task. `loose` also accepts the
    text without its first line, its last line, its asterisks, or any of these together. `repetition_penalty` is the
    most that words repeated in threes cost.
    """
    common = [_read_config(entry) for entry in checks]

    def score(text: str, data: Mapping[str, Any]) -> float:
        repeated = penalise_repetition(text, repetition_penalty) if repetition_penalty else 0.0
        told = _read_task(data, instructions, parameters)
        if not told and (constraint := _read_constraint(data.get(answer))) is not None:
            told, text = [constraint], text.rpartition("</think>")[2].lstrip("\n")
        all_instructions = [*common, *told]
        if not all_instructions:
            raise RewardError(f"no instruction to check: neither `checks` nor the task's {instructions!r} has one")
        text = "".join(one for one in text if one.isascii() or unicodedata.category(one) != "Cf")
        readings = make_loose_readings(text) if loose else [text]
        followed = [
            any(has_content(reading) and _is_followed(one, reading) for reading in readings) for one in all_instructions
        ]
        return (sum(followed) / len(followed) if partial else float(all(followed))) - repeated

    return BuiltInReward("ifeval", score)


def make_loose_readings(text: str) -> list[str]:
    """Return the text, and variants without the lines and asterisks that models like to put around an answer."""
    lines = text.split("\n")
    readings = [text, "\n".join(lines[1:]), "\n".join(lines[:-1]), "\n".join(lines[1:-1])]
    readings = [reading.strip() for reading in readings]
    return [text, *readings, *(reading.replace("*", "") for reading in readings)]


def _is_followed(instruction: Instruction, text: str) -> bool:
    name, given = instruction
    try:
        return IFEVAL_CHECKS[name](text, **given)
    except (TypeError, ValueError, AttributeError) as error:
        raise RewardError(f"{name} cannot be checked with {dict(given)}: {error}") from error


def _read_task(data: Mapping[str, Any], instructions: str, parameters: str) -> list[Instruction]:
    names, given = data.get(instructions) or [], data.get(parameters) or []
    if len(given) not in (0, len(names)):
        raise RewardError(f"the task has {len(names)} instructions and {len(given)} sets of parameters")
    for name in names:
        if name not in IFEVAL_CHECKS:
            raise RewardError(f"no check for the instruction {name!r}{suggest_close_match(name, IFEVAL_CHECKS)}")
    # IFEval's data has a null for every parameter of every other instruction.
    sets = [{key: value for key, value in (one or {}).items() if value is not None} for one in given]
    return list(zip(names, sets or [{}] * len(names), strict=True))


def _read_constraint(value: Any) -> Instruction | None:
    """Return the check of a constraint that names a function of open-instruct; `None` if the value is none."""
    if isinstance(value, str) and "func_name" in value:
        try:
            value = json.loads(value)
        except ValueError as error:
            raise RewardError(f"the task's constraint is no JSON: {error}") from error
    if not isinstance(value, Mapping) or not value.get("func_name"):
        return None
    name = str(value["func_name"])
    if name not in OPEN_INSTRUCT_CHECKS:
        raise RewardError(f"no check for the constraint {name!r}{suggest_close_match(name, OPEN_INSTRUCT_CHECKS)}")
    check, parameters, fixed = OPEN_INSTRUCT_CHECKS[name]
    return check, {**{ours: value.get(theirs) for theirs, ours in parameters.items()}, **fixed}


def _read_config(entry: Mapping[str, Any]) -> Instruction:
    given = dict(entry)
    name = given.pop("id", None)
    if name not in IFEVAL_CHECKS:
        hint = ", ".join(sorted(IFEVAL_CHECKS))
        problem = f"is no check{suggest_close_match(str(name), IFEVAL_CHECKS)}"
        raise ConfigError(problem, key="checks", value=name, hint=hint)
    try:
        inspect.signature(IFEVAL_CHECKS[name]).bind("", **given)
    except TypeError as error:
        raise ConfigError(f"{name}: {error}", key="checks", value=dict(entry)) from error
    return name, given


def compare_count(count: int, relation: str, wanted: int) -> bool:
    """Compare by IFEval's two relations, by the plain ones, or by `around`: a tenth more or less."""
    if relation == "around":
        return abs(count - wanted) <= max(round(wanted * 0.1), 1)
    if relation not in _RELATIONS:
        raise ValueError(f"relation {relation!r} is none of: {', '.join(_RELATIONS)}")
    return bool(_RELATIONS[relation](count, wanted))


def count_words(text: str) -> int:
    """Count words; a word may contain apostrophes and hyphens."""
    return len(re.findall(r"[^\W_]+(?:['’_-]+[^\W_]+)*", text))


def count_occurrences(text: str, word: str) -> int:
    """Count how often `word` (or words) stands in `text` by itself, whatever its case."""
    return len(re.findall(rf"(?<!\w){re.escape(word)}(?!\w)", text, re.IGNORECASE))


def count_sentences(text: str) -> int:
    """Count the sentences that have a word, the last one with or without an end."""
    text = re.sub(r"(?<=\d)\.(?=\d)", "", _ABBREVIATIONS.sub("x", text)).strip()
    return sum(map(has_content, _SENTENCE_END.split(text)))


def has_paragraphs(text: str, *, num_paragraphs: int) -> bool:
    """Check paragraphs that are divided by `***` or `* * *`; only those at either end may be empty."""
    parts = [part.strip() for part in re.split(r"\*\*\*|\* \* \*", text)]
    inner = parts[1 if not parts[0] else 0 : -1 if not parts[-1] else None]
    return all(map(has_content, inner)) and len(inner) == num_paragraphs


def has_first_word(text: str, *, num_paragraphs: int, nth_paragraph: int, first_word: str) -> bool:
    """Check the first word of a paragraph; paragraphs are divided by blank lines."""
    parts = [part.strip() for part in re.split(r"\n\s*\n", text) if part.strip()]
    if len(parts) != num_paragraphs or not 1 <= nth_paragraph <= len(parts):
        return False
    first = parts[nth_paragraph - 1].split()[0].strip("\"'.,?!*").casefold()
    return first == first_word.casefold()


def has_highlights(text: str, *, num_highlights: int) -> bool:
    """Check the number of passages between single or double asterisks."""
    double = [found for found in re.findall(r"\*\*([^*\n]+)\*\*", text) if has_content(found)]
    single = [found for found in re.findall(r"(?<!\*)\*([^*\n]+)\*(?!\*)", text) if has_content(found)]
    return len(double) + len(single) >= num_highlights


def is_json(text: str) -> bool:
    """Check that the text is a JSON object or array and nothing else, in a code fence or not."""
    fenced = re.fullmatch(r"```(?:json)?\s*\n?(.*?)\n?\s*```", text.strip(), re.DOTALL | re.IGNORECASE)
    try:
        value = json.loads(fenced.group(1) if fenced else text, parse_constant=_refuse_constant)
    except (ValueError, RecursionError):
        return False
    return isinstance(value, dict | list)


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is no JSON")


def has_postscript(text: str, *, postscript_marker: str = "P.S.") -> bool:
    """Check that a line begins with the marker, with any dots and blanks in it, and that something follows."""
    letters = r"\.?\s?".join(re.escape(letter) for letter in re.sub(r"[.\s]", "", postscript_marker))
    return re.search(rf"^[ \t]*{letters}\b\.?[ \t:]*[^\s.:]", text, re.MULTILINE | re.IGNORECASE) is not None


def has_two_responses(text: str) -> bool:
    """Check for two different responses that are divided by six asterisks."""
    parts = [part.strip() for part in text.split("******")]
    parts = [part for number, part in enumerate(parts) if part or 0 < number < len(parts) - 1]
    words = [re.findall(r"\w+", part.casefold()) for part in parts]
    return len(parts) == 2 and all(map(has_content, parts)) and words[0] != words[1]


def is_quoted(text: str) -> bool:
    """Check that the whole text stands in double quotation marks."""
    text = text.strip()
    return len(text) > 1 and _QUOTES.get(text[0]) == text[-1] and has_content(text[1:-1])


def has_no_word(text: str, *, forbidden_words: Sequence[str]) -> bool:
    """Check that no word stands in the text, also not in full-width or other variants of its letters."""
    texts = {text, unicodedata.normalize("NFKC", text)}
    return not any(count_occurrences(one, word) for one in texts for word in forbidden_words)


def has_sections(text: str, *, section_spliter: str, num_sections: int) -> bool:
    """Check the sections by their different numbers; each needs a content."""
    parts = re.split(rf"{re.escape(section_spliter.strip())}\s+(\d+)", text)
    numbers = {number for number, content in zip(parts[1::2], parts[2::2], strict=True) if has_content(content)}
    return len(numbers) >= num_sections


def repeats_prompt(text: str, *, prompt_to_repeat: str) -> bool:
    """Check that the text begins with the prompt and goes on with something else."""
    prompt = prompt_to_repeat.strip().casefold()
    begun, repeated, rest = text.strip().casefold().partition(prompt)
    return bool(repeated) and not begun and has_content(rest)


IFEVAL_CHECKS: dict[str, CheckFunction] = {
    "length_constraints:number_words": lambda text, *, num_words, relation="at least": compare_count(
        count_words(text), relation, num_words
    ),
    "length_constraints:number_sentences": lambda text, *, num_sentences, relation="at least": compare_count(
        count_sentences(text), relation, num_sentences
    ),
    "length_constraints:number_paragraphs": has_paragraphs,
    "length_constraints:nth_paragraph_first_word": has_first_word,
    "keywords:existence": lambda text, *, keywords: all(count_occurrences(text, word) for word in keywords),
    "keywords:forbidden_words": has_no_word,
    "keywords:frequency": lambda text, *, keyword, frequency, relation="at least": compare_count(
        count_occurrences(text, keyword), relation, frequency
    ),
    "keywords:letter_frequency": lambda text, *, letter, let_frequency, let_relation="at least": compare_count(
        text.casefold().count(letter.casefold()), let_relation, let_frequency
    ),
    "change_case:english_capital": lambda text: text.isupper(),
    "change_case:english_lowercase": lambda text: text.islower(),
    "change_case:capital_word_frequency": lambda text, *, capital_frequency, capital_relation="at least": compare_count(
        sum(word.isupper() for word in re.findall(r"\w+", text)), capital_relation, capital_frequency
    ),
    "punctuation:no_comma": lambda text: not any("COMMA" in unicodedata.name(one, "") for one in set(text)),
    "detectable_format:number_bullet_lists": lambda text, *, num_bullets: (
        len(re.findall(r"^[ \t]*(?:\*(?!\*)|-(?!-)|•)[ \t]*\S", text, re.MULTILINE)) == num_bullets
    ),
    "detectable_format:number_highlighted_sections": has_highlights,
    "detectable_format:multiple_sections": has_sections,
    "detectable_format:json_format": is_json,
    "detectable_format:title": lambda text: any(map(has_content, re.findall(r"<<([^<>\n]+)>>", text))),
    "detectable_format:constrained_response": lambda text: sum(answer in text for answer in _CONSTRAINED_ANSWERS) == 1,
    "detectable_format:choice": lambda text, *, options: (
        text.strip().casefold() in {str(one).strip().casefold() for one in options}
    ),
    "detectable_content:number_placeholders": lambda text, *, num_placeholders: (
        sum(map(has_content, re.findall(r"\[([^\[\]]+)\]", text))) >= num_placeholders
    ),
    "detectable_content:postscript": has_postscript,
    "startend:end_checker": lambda text, *, end_phrase: (
        text.strip().strip('"').casefold().endswith(end_phrase.strip().casefold())
    ),
    "startend:start_checker": lambda text, *, start_phrase: (
        text.strip().strip('"').casefold().startswith(start_phrase.strip().casefold())
    ),
    "startend:quotation": is_quoted,
    "combination:two_responses": has_two_responses,
    "combination:repeat_prompt": repeats_prompt,
}
"""Checks by IFEval's names."""
OPEN_INSTRUCT_CHECKS: dict[str, tuple[str, Mapping[str, str], Mapping[str, Any]]] = yaml.safe_load(
    files("headway.rewards").joinpath("open_instruct_checks.yaml").read_text(encoding="utf-8")
)
"""Functions of open-instruct: our check, its parameters by theirs, and parameters that are always the same."""
