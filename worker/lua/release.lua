-- Take a job from its holder and put it at the head of its queue, or behind the function that its claim left
-- there before it.
-- ARGV: queue, job id, execution id, mode ('given_back', 'engine_died' or 'abandoned'), max_deaths,
--       then for a job that has died too often: new execution id, worker, now_iso, now_ts, lease_s, far_score;
--       id of that function, or ''; what the job was found to be ('function'), or ''
-- Returns {'queued'}; {'alive'} when the lease of an 'abandoned' one still runs; {'gone'} when it is
-- held no longer; {'dropped'} when its job was cancelled or deleted; {'exhausted', claimed} when it has
-- taken max_deaths workers with it: then the caller holds it, to fail it. {'ended', claimed} when its end
-- is written but its dependents may wait still: then the caller holds it, to see to them.
local queue, id, eid, mode = ARGV[1], ARGV[2], ARGV[3], ARGV[4]
local job, execution = 'rq:job:' .. id, 'rq:execution:' .. id .. ':' .. eid
local wip, member = 'rq:wip:' .. queue, id .. ':' .. eid

if not redis.call('ZSCORE', wip, member) then return {'gone'} end
if mode == 'abandoned' and redis.call('EXISTS', execution) == 1 then return {'alive'} end
local held = guarded(holds, queue, id, eid)
local fields = held and guarded(redis.call, 'HMGET', job, 'status', 'ended_by', 'ttl')
if not fields then
  redis.call('ZREM', wip, member)
  redis.call('DEL', execution)
  return {'dropped'}
end
local status, ended_by, ttl = fields[1], fields[2], fields[3]
if ended_by == eid then
  redis.call('HSET', execution, 'id', eid, 'created_at', ARGV[9], 'last_heartbeat', ARGV[9], 'worker_name', ARGV[7])
  redis.call('EXPIRE', execution, ARGV[10])
  return {'ended', {id, eid, redis.call('HGETALL', job)}}
end
redis.call('ZREM', wip, member)
redis.call('DEL', execution, 'rq:executions:' .. id)
if status ~= 'started' then return {'dropped'} end

-- A count that is no number must not end this script half way: the next claim fails such a job for it.
local deaths = mode ~= 'given_back' and redis.pcall('HINCRBY', job, 'worker_deaths', 1)
if type(deaths) == 'number' and deaths >= tonumber(ARGV[5]) then
  return {'exhausted', open_execution(queue, id, ARGV[6], ARGV[7], ARGV[8], ARGV[9], ARGV[10], ARGV[11])}
end
redis.call('HSET', job, 'status', 'queued', 'worker_name', '')
if ARGV[13] ~= '' then redis.call('HSET', job, 'tokenmill_kind', ARGV[13]) end
expire_in_queue(job, ttl)
redis.call('SADD', 'rq:queues', 'rq:queue:' .. queue)
if ARGV[12] == '' or redis.call('LINSERT', 'rq:queue:' .. queue, 'AFTER', ARGV[12], id) < 1 then
  redis.call('LPUSH', 'rq:queue:' .. queue, id)
end
return {'queued'}
