-- Queue or schedule a failed job again, as RQ does for one with retries left, if this execution still
-- holds it. RQ's own way writes the status before the rest: a kill in between loses the job.
-- ARGV: those of end_execution.lua, when: 'front' or 'back' of the queue, or a Unix time in seconds;
--       the field that counts, and by how much; results_ttl_s ('' keeps), then field, value, ... of the
--       entry in rq:results, if there is one
-- Returns as finish.lua does; such a job has not ended, so its dependents wait on.
local when, ttl = ARGV[7], ARGV[10]
local reply = not_held()
if reply then return reply end

redis.call('HINCRBY', job, ARGV[8], ARGV[9])
redis.call('HSET', job, 'ended_at', ended_iso, 'last_heartbeat', ended_iso, 'retried_by', eid)
if #ARGV > 10 then
  redis.call('XADD', results, 'MAXLEN', '~', 10, '*', unpack(ARGV, 11))
  if ttl == '-1' then redis.call('PERSIST', results) elseif ttl ~= '' then redis.call('EXPIRE', results, ttl) end
end
redis.call('SADD', 'rq:queues', 'rq:queue:' .. queue)
if when == 'front' or when == 'back' then
  redis.call('HSET', job, 'status', 'queued', 'enqueued_at', ended_iso)
  redis.call(when == 'front' and 'LPUSH' or 'RPUSH', 'rq:queue:' .. queue, id)
else
  redis.call('HSET', job, 'status', 'scheduled')
  redis.call('ZADD', 'rq:scheduled:' .. queue, when, id)
end
local queue_ttl = tonumber(redis.call('HGET', job, 'ttl') or '')
if queue_ttl and queue_ttl >= 1 then
  redis.call('EXPIRE', job, math.floor(math.min(queue_ttl, 315360000)))
end
count('failed_job_count')
close_execution()
return 'done'
