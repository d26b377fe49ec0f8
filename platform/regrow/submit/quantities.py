"""Amounts as Kubernetes writes them."""


def decimal_quantity(thousandths: int) -> str:
    """A Kubernetes quantity with decimal units, as KubeRay's typed decoding and encoding leaves it.

    >>> decimal_quantity(16_000), decimal_quantity(17_500), decimal_quantity(200 * 10**12)
    ('16', '17500m', '200G')
    """
    units = ["m", "", "k", "M", "G", "T", "P", "E"]
    while thousandths and thousandths % 1000 == 0 and len(units) > 1:
        thousandths //= 1000
        units.pop(0)
    return f"{thousandths}{units[0] if thousandths else ''}"


def binary_quantity(num_bytes: int) -> str:
    """The same with binary units.

    >>> binary_quantity(512 * 2**30), binary_quantity(2048 * 2**30), binary_quantity(1536 * 2**20)
    ('512Gi', '2Ti', '1536Mi')
    """
    units = ["", "Ki", "Mi", "Gi", "Ti", "Pi", "Ei"]
    while num_bytes and num_bytes % 1024 == 0 and len(units) > 1:
        num_bytes //= 1024
        units.pop(0)
    return f"{num_bytes}{units[0]}"
