"""A search index in memory: BM25 over whole documents.

Guarantees: results depend on documents and query alone; equal scores keep the order of the documents. Scores are those
of Robertson and Zaragoza with k₁ = 1.2, b = 0.75 and an inverse document frequency that is never negative. Knows no
stems, no synonyms and no phrases; thousands of documents, not millions.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from heapq import nsmallest
from math import log

_WORD = re.compile(r"\w+")
_K1, _B = 1.2, 0.75


def words_of(text: str) -> list[str]:
    """The words of a text as the index compares them."""
    return _WORD.findall(text.casefold())


class Index:
    """Documents by their number; weights are counted once, when it is made."""

    def __init__(self, documents: Sequence[str]) -> None:
        counts = [Counter(words_of(document)) for document in documents]
        lengths = [sum(count.values()) for count in counts]
        average = sum(lengths) / max(len(lengths), 1) or 1.0
        containing = Counter(word for count in counts for word in count)
        self._weights: dict[str, list[tuple[int, float]]] = {}
        for number, (count, length) in enumerate(zip(counts, lengths, strict=True)):
            norm = _K1 * (1 - _B + _B * length / average)
            for word, times in count.items():
                rarity = log(1 + (len(counts) - containing[word] + 0.5) / (containing[word] + 0.5))
                weight = rarity * times * (_K1 + 1) / (times + norm)
                self._weights.setdefault(word, []).append((number, weight))

    def search(self, query: str, most: int) -> list[tuple[int, float]]:
        """Numbers and scores of the best documents that share a word with the query, best first."""
        scores: dict[int, float] = {}
        for word in dict.fromkeys(words_of(query)):
            for number, weight in self._weights.get(word, ()):
                scores[number] = scores.get(number, 0.0) + weight
        return nsmallest(most, scores.items(), key=lambda scored: (-scored[1], scored[0]))
