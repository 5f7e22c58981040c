"""Small pieces for the host kernels, so that small arrays are cut, and a pool with a number of threads."""

from mpipipe import processor
from mpipipe.attention.kernels import host as attention
from mpipipe.nn.kernels import host
from mpipipe.nn.kernels.host import flat, full_precision, products

WIDTH = 72


def sizes(elements, **of_products):
    return {products: of_products, **{module: dict(ELEMENTS=elements) for module in (host, flat, full_precision)}}


SMALL = sizes(512, WORK=1, ROWS=8, COLUMNS=16, PIECE=16 * WIDTH, WIDTH=16, SUMMED=64) | {
    attention: dict(ROWS=16, KEYS=16, SHARED=1)
}


def set_sizes(monkeypatch, values):
    for module, named in values.items():
        for name, value in named.items():
            monkeypatch.setattr(module, name, value)
    monkeypatch.setattr(attention, "_corner", getattr(attention._corner, "__wrapped__", attention._corner))


def new_pool(monkeypatch, threads):
    pool = processor._Pool()
    pool.threads = threads
    monkeypatch.setattr(processor, "_POOL", pool)
    return pool
