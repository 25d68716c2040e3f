"""Who runs where and when, and what happens after a failure?"""
