"""The conformance kit for distributions."""

from __future__ import annotations

from pdhub.testing.package_kit import PackageConformance


class TestPackage(PackageConformance):
    distribution = "pdhub-tilert"
