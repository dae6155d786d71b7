-- Queue a job whose dependencies are met, unless whoever ended another of them has done so.
-- ARGV: queue, job id, id of the job it waited for, now_iso, at_front (1 or 0)
local queue, id = ARGV[1], ARGV[2]
local job = 'rq:job:' .. id
redis.call('SREM', 'rq:job:' .. ARGV[3] .. ':dependents', id)
local fields = redis.call('HMGET', job, 'status', 'ttl')
if redis.call('EXISTS', job) == 0 then return 0 end
if fields[1] == 'canceled' and redis.call('ZSCORE', 'rq:canceled:' .. queue, id) then return 0 end
-- Who takes it from there has its turn: its status may be that of a copy that somebody saved.
if redis.call('ZREM', 'rq:deferred:' .. queue, id) == 0 then return 0 end
redis.call('SADD', 'rq:queues', 'rq:queue:' .. queue)
redis.call('HSET', job, 'status', 'queued', 'enqueued_at', ARGV[4])
expire_in_queue(job, fields[2])
redis.call(ARGV[5] == '1' and 'LPUSH' or 'RPUSH', 'rq:queue:' .. queue, id)
return 1
