"""The package list; what else describes the package is in pyproject.toml."""

from setuptools import find_packages, setup

setup(packages=find_packages(include=["headrace", "headrace.*"]))
