-- Shared head of finish.lua and retry.lua: the fence, and what both write.
-- ARGV: queue, job id, execution id, ended_iso, worker key, working_s, then the script's own
local queue, id, eid, ended_iso = ARGV[1], ARGV[2], ARGV[3], ARGV[4]
local job, execution = 'rq:job:' .. id, 'rq:execution:' .. id .. ':' .. eid
local wip, member, results = 'rq:wip:' .. queue, id .. ':' .. eid, 'rq:results:' .. id

-- 'again' or 'lost' where this execution does not hold the job, and nothing of ours is left behind.
local function not_held()
  if redis.call('ZSCORE', wip, member) and redis.call('HGET', job, 'status') == 'started' then return nil end
  redis.call('DEL', execution)
  redis.call('ZREM', wip, member)
  redis.call('ZREM', 'rq:executions:' .. id, eid)
  if redis.call('HGET', job, 'retried_by') == eid then return 'again' end
  local latest = redis.call('XREVRANGE', results, '+', '-', 'COUNT', 1)[1]
  if latest then
    for i = 1, #latest[2], 2 do
      if latest[2][i] == 'execution_id' and latest[2][i + 1] == eid then return 'again' end
    end
  end
  return 'lost'
end

local function close_execution(counter)
  redis.call('DEL', execution, 'rq:executions:' .. id)
  redis.call('ZREM', wip, member)
  redis.call('HINCRBY', ARGV[5], counter, 1)
  redis.call('HINCRBYFLOAT', ARGV[5], 'total_working_time', ARGV[6])
end
