"""For tests of agl-lite and of plugins: contract suites, loopback servers, a clock to turn by hand.

The service itself never imports this package.
"""
