"""Environments that come with Headway, one module each. Third-party libraries are imported when one is made."""
