"""Predictions: the steps, messages, bytes and seconds of each technique, from formulas.

    traffic             what every collective and technique sends, exact to the byte
    link                the alpha-beta model of a link, fitted to measured messages
    hosts               all-reduce over several hosts: bytes over a card, seconds with two links
    seconds             the time of an all-reduce, and of a parameter server's push and pull
    ddp_step            a step of DDP: backward, and the all-reduces of its buckets
    async_run           a run of an asynchronous parameter server
    pipeline_timeline   a step of a pipeline, action by action
    makespan            the length of that step alone, fast enough for a search

The code that counts a real run's messages never imports this package, so a wrong formula shows.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
