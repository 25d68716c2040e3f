"""The text of docs/guides/overnight.md, around what a run showed."""

GUIDE = """\
# A night

<!-- Written by `python -m docs.overnight`, which runs this night. Edit that, not this file. -->

A night from `orc submit` in the evening to the report in the morning. It was run on two virtual devices with scripts
that need minutes, so that the whole took {took} minutes. Nothing of it was edited.

## In the evening

A folder has a job file for each training. One of them:

```text
# jobs/2-wide-batch.yaml
{example}```

All are submitted together. They get numbers, and start as devices are free:

```text
$ orc up
$ orc submit jobs/*.yaml
{submit}
```

Then nobody looks. A minute later somebody would have seen this:

```text
$ orc queue
{queue}
```

## What happened meanwhile

| job | met | what followed |
|---|---|---|
| `voice` | its process was killed from outside | it went on from its newest checkpoint |
| `wide-batch` | ran out of memory at step 50, where its samples grow | a smaller micro-batch, the same global batch |
| `typo` | a KeyError at step 30 | it was tried once more, then it failed with the line |
| `stuck` | made no step for 15 s | it was ended and tried again, then it failed |
| `too-large` | ran out of memory at every micro-batch | it failed, and said what it would need |
| `seeds` | nothing: three jobs of an array | they trained in turn |

## In the morning

After a real night it is `orc report --since 22:00`.

```text
$ orc report --since 1h
{report}
```

The same stands on a page, for a desk and for a phone, and comes by mail, chat or webhook at an hour of your choice
([notifications](notifications.md)):

![The overview: what failed, what recovered, and the night on both devices](overnight-overview.png)

![The report on a phone](overnight-phone.png)

`orc show` has the attempts of one job, with the change that followed each failure:

```text
{show}
```

## Your own night

`orc init python train.py ...` proposes each job file. `orc plan` says what fits before you go home, and
[what happens when](what-happens.md) lists every end.
"""
