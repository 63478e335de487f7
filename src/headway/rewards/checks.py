"""Checks of how a text is written, one function each, under the names that IFEval gave them.

Each takes the text and its own parameters by keyword, as IFEval's data spells them, and answers yes or no in time
linear in the text. Not here: the language of a response, which needs a model of its own.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence

Check = Callable[..., bool]
CHECKS: dict[str, Check] = {}

_ABBREVIATIONS = re.compile(r"\b(?:Mr|Mrs|Ms|Dr|Prof|St|Sr|Jr|vs|etc|e\.g|i\.e|a\.m|p\.m|No|Fig)\.", re.IGNORECASE)
_SENTENCE_END = re.compile(r"[.!?]+[\"')\]]*(?=\s|$)")
_CONSTRAINED = ("My answer is yes.", "My answer is no.", "My answer is maybe.")
_QUOTES = {'"': '"', "\N{LEFT DOUBLE QUOTATION MARK}": "\N{RIGHT DOUBLE QUOTATION MARK}"}


def check(name: str) -> Callable[[Check], Check]:
    """Register a check under IFEval's name for it."""

    def register(function: Check) -> Check:
        CHECKS[name] = function
        return function

    return register


def related(count: int, relation: str, wanted: int) -> bool:
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


def occurrences(text: str, word: str) -> int:
    """How often `word` stands in `text` as a word (or words) of its own, whatever its case."""
    return len(re.findall(rf"(?<!\w){re.escape(word)}(?!\w)", text, re.IGNORECASE))


def sentences(text: str) -> int:
    """Sentences: ends of them, and a last one without."""
    text = re.sub(r"(?<=\d)\.(?=\d)", "", _ABBREVIATIONS.sub("x", text)).strip()
    ends = list(_SENTENCE_END.finditer(text))
    rest = text[ends[-1].end() :] if ends else text
    return len(ends) + bool(rest.strip())


# -- length


@check("length_constraints:number_words")
def number_words(text: str, *, num_words: int, relation: str = "at least") -> bool:
    return related(len(re.findall(r"\w+(?:['’-]\w+)*", text)), relation, num_words)


@check("length_constraints:number_sentences")
def number_sentences(text: str, *, num_sentences: int, relation: str = "at least") -> bool:
    return related(sentences(text), relation, num_sentences)


@check("length_constraints:number_paragraphs")
def number_paragraphs(text: str, *, num_paragraphs: int) -> bool:
    """Paragraphs are divided by `***`; empty ones may stand at either end only."""
    parts = [part.strip() for part in text.split("***")]
    inner = parts[1 if not parts[0] else 0 : -1 if not parts[-1] else None]
    return all(inner) and len(inner) == num_paragraphs


@check("length_constraints:nth_paragraph_first_word")
def nth_paragraph_first_word(text: str, *, num_paragraphs: int, nth_paragraph: int, first_word: str) -> bool:
    """Paragraphs are divided by blank lines."""
    parts = [part.strip() for part in re.split(r"\n\s*\n", text) if part.strip()]
    if len(parts) != num_paragraphs or not 1 <= nth_paragraph <= len(parts):
        return False
    first = parts[nth_paragraph - 1].split()[0].strip("\"'.,?!*").casefold()
    return first == first_word.casefold()


# -- words


@check("keywords:existence")
def keywords_exist(text: str, *, keywords: Sequence[str]) -> bool:
    return all(occurrences(text, word) for word in keywords)


@check("keywords:forbidden_words")
def keywords_absent(text: str, *, forbidden_words: Sequence[str]) -> bool:
    return not any(occurrences(text, word) for word in forbidden_words)


@check("keywords:frequency")
def keyword_frequency(text: str, *, keyword: str, frequency: int, relation: str = "at least") -> bool:
    return related(occurrences(text, keyword), relation, frequency)


@check("keywords:letter_frequency")
def letter_frequency(text: str, *, letter: str, let_frequency: int, let_relation: str = "at least") -> bool:
    return related(text.casefold().count(letter.casefold()), let_relation, let_frequency)


# -- case and punctuation


@check("change_case:english_capital")
def all_capital(text: str) -> bool:
    return text.isupper()


@check("change_case:english_lowercase")
def all_lowercase(text: str) -> bool:
    return text.islower()


@check("change_case:capital_word_frequency")
def capital_words(text: str, *, capital_frequency: int, capital_relation: str = "at least") -> bool:
    return related(sum(word.isupper() for word in re.findall(r"\w+", text)), capital_relation, capital_frequency)


@check("punctuation:no_comma")
def no_comma(text: str) -> bool:
    return not any(comma in text for comma in (",", "，", "、"))


# -- form


@check("detectable_format:number_bullet_lists")
def number_bullets(text: str, *, num_bullets: int) -> bool:
    return len(re.findall(r"^[ \t]*(?:\*(?!\*)|-(?!-)|•)[ \t]*\S", text, re.MULTILINE)) == num_bullets


@check("detectable_format:number_highlighted_sections")
def number_highlights(text: str, *, num_highlights: int) -> bool:
    double = [found for found in re.findall(r"\*\*([^*\n]+)\*\*", text) if found.strip()]
    single = [found for found in re.findall(r"(?<!\*)\*([^*\n]+)\*(?!\*)", text) if found.strip()]
    return len(double) + len(single) >= num_highlights


@check("detectable_format:multiple_sections")
def multiple_sections(text: str, *, section_spliter: str, num_sections: int) -> bool:
    return len(re.findall(rf"{re.escape(section_spliter.strip())}\s+\d+", text)) >= num_sections


@check("detectable_format:json_format")
def json_format(text: str) -> bool:
    """Nothing but JSON, in a code fence or not."""
    fenced = re.fullmatch(r"```(?:json)?\s*\n?(.*?)\n?\s*```", text.strip(), re.DOTALL | re.IGNORECASE)
    try:
        json.loads(fenced.group(1) if fenced else text)
    except (ValueError, RecursionError):
        return False
    return True


@check("detectable_format:title")
def title(text: str) -> bool:
    return any(found.strip("<> ") for found in re.findall(r"<<[^<>\n]+>>", text))


@check("detectable_format:constrained_response")
def constrained_response(text: str) -> bool:
    return any(answer in text for answer in _CONSTRAINED)


@check("detectable_content:number_placeholders")
def number_placeholders(text: str, *, num_placeholders: int) -> bool:
    return len(re.findall(r"\[[^\[\]]+\]", text)) >= num_placeholders


@check("detectable_content:postscript")
def postscript(text: str, *, postscript_marker: str = "P.S.") -> bool:
    """A line begins with the marker, dots and blanks in it as you like, and something follows."""
    letters = r"\.?\s?".join(re.escape(letter) for letter in re.sub(r"[.\s]", "", postscript_marker))
    return re.search(rf"^[ \t]*{letters}\b\.?[ \t:]*[^\s.:]", text, re.MULTILINE | re.IGNORECASE) is not None


# -- start, end, combination


@check("startend:end_checker")
def ends_with(text: str, *, end_phrase: str) -> bool:
    return text.strip().strip('"').casefold().endswith(end_phrase.strip().casefold())


@check("startend:start_checker")
def starts_with(text: str, *, start_phrase: str) -> bool:
    return text.strip().strip('"').casefold().startswith(start_phrase.strip().casefold())


@check("startend:quotation")
def quotation(text: str) -> bool:
    text = text.strip()
    return len(text) > 1 and _QUOTES.get(text[0]) == text[-1]


@check("combination:two_responses")
def two_responses(text: str) -> bool:
    parts = [part.strip() for part in text.split("******")]
    parts = [part for place, part in enumerate(parts) if part or 0 < place < len(parts) - 1]
    return len(parts) == 2 and all(parts) and parts[0] != parts[1]


@check("combination:repeat_prompt")
def repeat_prompt(text: str, *, prompt_to_repeat: str) -> bool:
    return text.strip().casefold().startswith(prompt_to_repeat.strip().casefold())
