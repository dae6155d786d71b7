-- Write everything that RQ writes when a job ends, if this execution still holds the job.
-- ARGV: queue, job id, execution id, status ('finished' or 'failed'), ended_iso, key_ttl_s ('' keeps),
--       registry_score, worker key, working_s, then field, value, ... of the entry in rq:results
-- Returns 'done'; 'again' when this very call was carried out before (its reply was lost); 'lost' when
-- the job was given up, cancelled or deleted, and nothing was written; 'dependents' when jobs wait for
-- this one, which is RQ's own path, and nothing was written.
local queue, id, eid, status, ended_iso, ttl = ARGV[1], ARGV[2], ARGV[3], ARGV[4], ARGV[5], ARGV[6]
local job, execution = 'rq:job:' .. id, 'rq:execution:' .. id .. ':' .. eid
local wip, member, results = 'rq:wip:' .. queue, id .. ':' .. eid, 'rq:results:' .. id

if not redis.call('ZSCORE', wip, member) or redis.call('HGET', job, 'status') ~= 'started' then
  local latest = redis.call('XREVRANGE', results, '+', '-', 'COUNT', 1)[1]
  if latest then
    for i = 1, #latest[2], 2 do
      if latest[2][i] == 'execution_id' and latest[2][i + 1] == eid then return 'again' end
    end
  end
  redis.call('DEL', execution)
  redis.call('ZREM', wip, member)
  redis.call('ZREM', 'rq:executions:' .. id, eid)
  return 'lost'
end
if redis.call('EXISTS', job .. ':dependents') == 1 then return 'dependents' end

local keys = {job, job .. ':dependents', 'rq:job::' .. id .. ':dependencies'}
if status == 'finished' and ttl == '0' then
  redis.call('DEL', unpack(keys))
else
  redis.call('HSET', job, 'status', status, 'ended_at', ended_iso, 'last_heartbeat', ended_iso)
  redis.call('XADD', results, 'MAXLEN', '~', 10, '*', unpack(ARGV, 10))
  redis.call('ZADD', 'rq:' .. status .. ':' .. queue, ARGV[7], id)
  if ttl == '-1' then
    redis.call('PERSIST', results)
  elseif ttl == '0' then
    redis.call('DEL', results, unpack(keys))
  elseif ttl ~= '' then
    redis.call('EXPIRE', results, ttl)
    for _, key in ipairs(keys) do redis.call('EXPIRE', key, ttl) end
  end
end
redis.call('DEL', execution, 'rq:executions:' .. id)
redis.call('ZREM', wip, member)
redis.call('HINCRBY', ARGV[8], status == 'finished' and 'successful_job_count' or 'failed_job_count', 1)
redis.call('HINCRBYFLOAT', ARGV[8], 'total_working_time', ARGV[9])
return 'done'
