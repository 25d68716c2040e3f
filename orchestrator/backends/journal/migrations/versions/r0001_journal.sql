-- The tables of version 0.1.0. The module that uses a table documents its columns.
-- $number is the type of keys that are never given again, also those of rows that were deleted.
CREATE TABLE events (id $number, body TEXT NOT NULL, decided TEXT);
CREATE TABLE snapshots (id INTEGER NOT NULL PRIMARY KEY, body TEXT NOT NULL);
CREATE TABLE live (id TEXT NOT NULL PRIMARY KEY, body TEXT NOT NULL);
CREATE TABLE jobs (
    number $number,
    id TEXT NOT NULL UNIQUE,
    status TEXT NOT NULL,
    submitted_at FLOAT NOT NULL,
    ended_at FLOAT NOT NULL,
    body TEXT NOT NULL
);
CREATE TABLE outbox (id $number, body TEXT NOT NULL, ran BOOLEAN NOT NULL);
CREATE INDEX outbox_in_order ON outbox (ran, id);
CREATE TABLE notices (id $number, body TEXT NOT NULL, ran BOOLEAN NOT NULL);
CREATE INDEX notices_in_order ON notices (ran, id);
CREATE TABLE trackers (name TEXT NOT NULL PRIMARY KEY, last_row INTEGER NOT NULL);
CREATE TABLE targets (name TEXT NOT NULL PRIMARY KEY, last_row INTEGER NOT NULL);
-- the tracker of a cluster file that names none
INSERT INTO trackers (name, last_row) VALUES ('mlflow', 0);
CREATE TABLE told (id TEXT NOT NULL PRIMARY KEY, kind TEXT NOT NULL, at_s FLOAT NOT NULL);
CREATE TABLE users (name TEXT NOT NULL PRIMARY KEY, role TEXT NOT NULL, created_at FLOAT NOT NULL);
CREATE TABLE tokens (
    id $serial,
    "user" TEXT NOT NULL REFERENCES users (name) ON DELETE CASCADE,
    digest TEXT NOT NULL UNIQUE,
    shown TEXT NOT NULL,
    created_at FLOAT NOT NULL,
    expires_at FLOAT,
    revoked_at FLOAT,
    used_at FLOAT
);
CREATE TABLE audit (
    id $serial,
    at FLOAT NOT NULL,
    "user" TEXT NOT NULL,
    role TEXT NOT NULL,
    request_id TEXT NOT NULL,
    action TEXT NOT NULL,
    status INTEGER NOT NULL
);
CREATE TABLE sweeps (number $number, id TEXT NOT NULL UNIQUE, ended TEXT);
CREATE TABLE trials (job TEXT NOT NULL PRIMARY KEY, sweep TEXT NOT NULL, number INTEGER NOT NULL, value FLOAT);
CREATE INDEX ix_trials_sweep ON trials (sweep);
CREATE TABLE submissions ("key" TEXT NOT NULL PRIMARY KEY, digest TEXT NOT NULL, jobs TEXT NOT NULL, at_s FLOAT NOT NULL);
CREATE INDEX ix_submissions_at_s ON submissions (at_s);
CREATE TABLE set_aside (
    "table" TEXT NOT NULL,
    "row" TEXT NOT NULL,
    body TEXT NOT NULL,
    reason TEXT NOT NULL,
    at FLOAT NOT NULL,
    PRIMARY KEY ("table", "row")
);
