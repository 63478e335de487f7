"""Pages of the KV cache: which are free, how many use each, and a tree of the prefixes that they hold.

A page holds the KV of `page_tokens` consecutive tokens of a sequence. Sequences that begin alike share the pages of
what they have in common; where they part inside a page, the later one gets a copy of it. The tree holds prefixes of one
version of the weights. Its pages are given up, least recently used first, when sequences need them. Knows no tensor.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from heapq import heappop, heappush
from itertools import islice

_MOST_CANDIDATES = 64
"""Pages of the tree that are compared token by token for one request."""


class PagePool:
    """Counts the users of each page. Page 0 is never given out: lanes without a sequence write there."""

    def __init__(self, pages: int) -> None:
        self._users = [0] * pages
        self._free = list(range(pages - 1, 0, -1))

    @property
    def free(self) -> int:
        """Number of pages that nobody uses."""
        return len(self._free)

    @property
    def used(self) -> int:
        """Number of pages that somebody uses."""
        return len(self._users) - 1 - len(self._free)

    def take(self, count: int) -> list[int]:
        """Return free pages, with one user each."""
        taken = [self._free.pop() for _ in range(count)]
        for page in taken:
            self._users[page] = 1
        return taken

    def share(self, pages: Iterable[int]) -> None:
        """Add a user to each."""
        for page in pages:
            self._users[page] += 1

    def release(self, pages: Iterable[int]) -> None:
        """Take a user from each; those without one are free."""
        for page in pages:
            self._users[page] -= 1
            if not self._users[page]:
                self._free.append(page)

    def is_shared(self, page: int) -> bool:
        """Return whether a page has several users."""
        return self._users[page] > 1


class _PageNode:
    """One page of a prefix, and what was seen to follow it."""

    __slots__ = ("children", "page", "parent", "tokens", "used")

    def __init__(self, parent: _PageNode | None, tokens: tuple[int, ...], page: int) -> None:
        self.parent = parent
        """None for the root, and for a page that was given up."""
        self.tokens = tokens
        self.page = page
        self.children: dict[tuple[int, ...], _PageNode] = {}
        self.used = 0


class PrefixTree:
    """Prefixes by their tokens, page by page. A page that is not full has nothing below it."""

    def __init__(self, pool: PagePool, page_tokens: int) -> None:
        self._pool = pool
        self._page_tokens = page_tokens
        self._root = _PageNode(None, (), 0)
        self._clock = 0
        self._leaves: list[tuple[int, int, _PageNode]] = []
        """A heap by the time of use; entries may be out of date."""
        self._nodes: dict[int, _PageNode] = {}
        """The node of each page: a page is in the tree once, with as many tokens as are known of it."""

    def match(self, tokens: Sequence[int], most: int) -> tuple[list[int], int, int]:
        """Return the full pages that `tokens` begin with, and a page of which so many tokens follow; at most `most`."""
        node, pages, at = self._root, list[int](), 0
        while at + self._page_tokens <= most:
            child = node.children.get(tuple(tokens[at : at + self._page_tokens]))
            if child is None:
                break
            node = self._touch(child)
            pages.append(node.page)
            at += self._page_tokens
        rest = tuple(tokens[at : min(at + self._page_tokens, most)])
        exact = node.children.get(rest)
        candidates = [exact] if exact else islice(reversed(node.children.values()), _MOST_CANDIDATES)
        best, count = None, 0
        for child in candidates:
            if (common := _count_common(child.tokens, rest)) > count:
                best, count = child, common
        return pages, self._touch(best).page if best is not None else 0, count

    def insert(self, tokens: Sequence[int], length: int, pages: Sequence[int]) -> None:
        """Hold the first `length` tokens of a sequence, whose pages these are."""
        node = self._root
        for number in range(-(-length // self._page_tokens)):
            first = number * self._page_tokens
            part = tuple(tokens[first : min(first + self._page_tokens, length)])
            child = node.children.get(part)
            if child is None:
                child = self._add(node, part, pages[number])
            node = self._touch(child)

    def evict(self, count: int) -> None:
        """Give up as many pages as are used by nobody else, at most `count`."""
        in_use = []
        while count > 0 and self._leaves:
            used, _, node = heappop(self._leaves)
            parent = node.parent
            if parent is None or node.children:
                continue
            if node.used != used:
                self._push(node)
            elif self._pool.is_shared(node.page):
                in_use.append(node)
            else:
                count -= 1
                self._remove(node, parent)
                self._pool.release((node.page,))
                if parent is not self._root and not parent.children:
                    self._push(parent)
        for node in in_use:
            self._push(node)

    def clear(self) -> None:
        """Give up everything: other weights are served from now on."""
        nodes = list(self._root.children.values())
        while nodes:
            node = nodes.pop()
            self._pool.release((node.page,))
            nodes.extend(node.children.values())
        self._root, self._leaves, self._nodes = _PageNode(None, (), 0), [], {}

    def _add(self, parent: _PageNode, tokens: tuple[int, ...], page: int) -> _PageNode:
        shorter = self._nodes.get(page)
        if shorter is not None and shorter.parent is not None:  # the page has been filled since
            self._remove(shorter, shorter.parent)
        else:
            self._pool.share((page,))
        node = parent.children[tokens] = self._nodes[page] = _PageNode(parent, tokens, page)
        self._push(self._touch(node))
        return node

    def _remove(self, node: _PageNode, parent: _PageNode) -> None:
        del parent.children[node.tokens], self._nodes[node.page]
        node.parent = None

    def _touch(self, node: _PageNode) -> _PageNode:
        self._clock += 1
        node.used = self._clock
        return node

    def _push(self, node: _PageNode) -> None:
        heappush(self._leaves, (node.used, id(node), node))


def _count_common(one: Sequence[int], other: Sequence[int]) -> int:
    """Return how many tokens both begin with."""
    if one == other:
        return len(one)
    count = 0
    for left, right in zip(one, other, strict=False):
        if left != right:
            break
        count += 1
    return count
