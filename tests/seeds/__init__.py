"""The documents that Headway implements, as tests: one module a document, one test a promise, in its order.

Names say the section and what it promises. docs/seeds.md lists what Headway does differently on purpose, and why.
"""
