-- Queue a job whose dependencies are met, unless whoever ended another of them has done so.
-- ARGV: queue, job id, id of the job it waited for, now_iso, at_front (1 or 0)
local queue, id = ARGV[1], ARGV[2]
local job = 'rq:job:' .. id
redis.call('SREM', 'rq:job:' .. ARGV[3] .. ':dependents', id)
local fields = redis.call('HMGET', job, 'status', 'ttl')
if fields[1] ~= 'deferred' then return 0 end
redis.call('ZREM', 'rq:deferred:' .. queue, id)
redis.call('SADD', 'rq:queues', 'rq:queue:' .. queue)
redis.call('HSET', job, 'status', 'queued', 'enqueued_at', ARGV[4])
expire_in_queue(job, fields[2])
redis.call(ARGV[5] == '1' and 'LPUSH' or 'RPUSH', 'rq:queue:' .. queue, id)
return 1
