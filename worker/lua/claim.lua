-- Take jobs of one queue whose status is still 'queued', and open their executions, until they bring
-- `limit` sequences: one each, or what the job's own field `sequences` says.
-- ARGV: queue, limit, token, worker, now_iso, now_ts, lease_s, far_score, last_life, alone, then the tokens
--       of claims whose records nobody needs any more
-- A job that has taken `last_life` workers with it is claimed by itself, where `alone` is 1, so that jobs
-- that were merely near another one when it killed its worker are told from that one; elsewhere such jobs
-- go to the end of the queue.
-- Returns {{job id, execution id, job hash}, ...}. Sent again with the same token it returns the same
-- jobs, less those that were taken from this worker since, and claims no others. With a limit of 0 it
-- asks what an earlier call has claimed, and makes sure that one still on its way claims nothing.
local queue, limit, token, worker = ARGV[1], tonumber(ARGV[2]), ARGV[3], ARGV[4]
local record = 'tokenmill:claim:' .. token
local claimed = {}

for i = 11, #ARGV do redis.call('DEL', 'tokenmill:claim:' .. ARGV[i]) end
local earlier = redis.call('LRANGE', record, 0, -1)
if #earlier > 0 then
  for i, id in ipairs(earlier) do
    local eid = token .. string.format('%08x', i)
    if redis.call('ZSCORE', 'rq:wip:' .. queue, id .. ':' .. eid) then
      claimed[#claimed + 1] = {id, eid, redis.call('HGETALL', 'rq:job:' .. id)}
    end
  end
  return claimed
end
if limit == 0 then
  redis.call('RPUSH', record, '')
  redis.call('EXPIRE', record, 600)
  return claimed
end

-- Bounded, so that a queue of a million deleted jobs does not stop the server for the others.
local sequences = 0
local last_life, alone, passed = tonumber(ARGV[9]), ARGV[10] == '1', {}
for _ = 1, limit + 1000 do
  if sequences >= limit then break end
  local id = redis.call('LPOP', 'rq:queue:' .. queue)
  if not id then break end
  local job = guarded(redis.call, 'HMGET', 'rq:job:' .. id, 'status', 'worker_deaths', 'sequences') or {}
  local is_suspect = (tonumber(job[2]) or 0) >= last_life
  if job[1] == 'queued' and is_suspect and (not alone or #claimed > 0) then
    redis.call('RPUSH', 'rq:queue:' .. queue, id)
    if passed[id] then break end
    passed[id] = true
  elseif job[1] == 'queued' then
    local eid = token .. string.format('%08x', #claimed + 1)
    claimed[#claimed + 1] =
      open_execution(queue, id, eid, worker, ARGV[5], ARGV[6], ARGV[7], ARGV[8])
    redis.call('RPUSH', record, id)
    sequences = sequences + math.max(1, tonumber(job[3]) or 1)
    if is_suspect then break end
  end
end
if #claimed > 0 then redis.call('EXPIRE', record, 600) end
return claimed
