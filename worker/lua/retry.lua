-- Queue or schedule a failed job again, as RQ does for one with retries left, if this execution still
-- holds it. RQ's own way writes the status before the rest: a kill in between loses the job.
-- ARGV: those of end_execution.lua, when: 'front' or 'back' of the queue, or a Unix time in seconds
-- Returns as finish.lua does; such a job has not ended, so its dependents wait on.
local when = ARGV[7]
local reply = not_held()
if reply then return reply end

redis.call('HINCRBY', job, 'retries_left', -1)
redis.call('HSET', job, 'ended_at', ended_iso, 'last_heartbeat', ended_iso, 'retried_by', eid)
redis.call('SADD', 'rq:queues', 'rq:queue:' .. queue)
if when == 'front' or when == 'back' then
  redis.call('HSET', job, 'status', 'queued', 'enqueued_at', ended_iso)
  redis.call(when == 'front' and 'LPUSH' or 'RPUSH', 'rq:queue:' .. queue, id)
else
  redis.call('HSET', job, 'status', 'scheduled')
  redis.call('ZADD', 'rq:scheduled:' .. queue, when, id)
end
local ttl = tonumber(redis.call('HGET', job, 'ttl') or '')
if ttl and ttl >= 1 then redis.call('EXPIRE', job, math.floor(math.min(ttl, 315360000))) end
count('failed_job_count')
close_execution()
return 'done'
