-- Write everything that RQ writes when a job ends, if this execution still holds the job.
-- ARGV: those of end_execution.lua, status ('finished', 'failed' or 'stopped'), key_ttl_s ('' keeps),
--       registry_score, then field, value, ... of the entry in rq:results
-- Returns 'done'; 'dependents' when jobs wait for this one: it has ended, but stays held until they are
-- queued and close.lua was called; 'again' when this very call was carried out before (its reply was
-- lost); 'lost' when the job was given up, cancelled or deleted, and nothing was written.
local status, ttl, score = ARGV[7], ARGV[8], ARGV[9]

local reply = not_held()
if reply then return reply end

redis.call('HSET', job, 'status', status, 'ended_at', ended_iso, 'last_heartbeat', ended_iso)
if status == 'finished' then
  if ttl ~= '0' then redis.call('ZADD', 'rq:finished:' .. queue, score, id) end
  count('successful_job_count')
else
  redis.call('ZADD', 'rq:failed:' .. queue, score, id)
  count('failed_job_count')
end
redis.call('XADD', results, 'MAXLEN', '~', 10, '*', unpack(ARGV, 10))
if redis.call('EXISTS', job .. ':dependents') == 1 then
  redis.call('HSET', job, 'ended_by', eid, 'ended_ttl', ttl)
  return 'dependents'
end
expire(ttl)
close_execution()
return 'done'
