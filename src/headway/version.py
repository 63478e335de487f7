"""The version of Headway."""

VERSION = "0.1.0"
