-- Write everything that RQ writes when a job ends, if this execution still holds the job.
-- ARGV: those of end_execution.lua, status ('finished', 'failed' or 'stopped'), key_ttl_s ('' keeps),
--       registry_score, then field, value, ... of the entry in rq:results
-- Returns 'done'; 'again' when this very call was carried out before (its reply was lost); 'lost' when
-- the job was given up, cancelled or deleted, and nothing was written; 'dependents' when jobs wait for
-- this one, which is RQ's own path, and nothing was written.
local status, ttl, score = ARGV[7], ARGV[8], ARGV[9]
local registry = status == 'finished' and 'finished' or 'failed'

local reply = not_held()
if reply then return reply end
if redis.call('EXISTS', job .. ':dependents') == 1 then return 'dependents' end

local keys = {job, job .. ':dependents', 'rq:job::' .. id .. ':dependencies'}
if status == 'finished' and ttl == '0' then
  redis.call('DEL', unpack(keys))
else
  redis.call('HSET', job, 'status', status, 'ended_at', ended_iso, 'last_heartbeat', ended_iso)
  redis.call('XADD', results, 'MAXLEN', '~', 10, '*', unpack(ARGV, 10))
  redis.call('ZADD', 'rq:' .. registry .. ':' .. queue, score, id)
  if ttl == '-1' then
    redis.call('PERSIST', results)
  elseif ttl == '0' then
    redis.call('DEL', results, unpack(keys))
  elseif ttl ~= '' then
    redis.call('EXPIRE', results, ttl)
    for _, key in ipairs(keys) do redis.call('EXPIRE', key, ttl) end
  end
end
close_execution(status == 'finished' and 'successful_job_count' or 'failed_job_count')
return 'done'
