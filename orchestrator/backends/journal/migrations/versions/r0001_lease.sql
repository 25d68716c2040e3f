-- Who owns a journal that is no file: one row.
CREATE TABLE lease (
    id $serial,
    fence BIGINT NOT NULL,
    holder TEXT NOT NULL,
    expires_at TIMESTAMP WITH TIME ZONE NOT NULL
);
INSERT INTO lease (id, fence, holder, expires_at) VALUES (1, 0, 'nobody', clock_timestamp());
