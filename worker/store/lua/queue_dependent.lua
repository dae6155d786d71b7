-- Queue a job whose dependencies are met, unless whoever ended another of them has done so.
-- ARGV: queue, job id, id of the job it waited for, now_iso, at_front (1 or 0), now_ts
local queue, id = ARGV[1], ARGV[2]
local job = 'rq:job:' .. id
call('SREM', 'rq:job:' .. ARGV[3] .. ':dependents', id)
local fields = call('HMGET', job, 'status', 'ttl', 'rate_limit_key', 'rate_limit_concurrency')
if call('EXISTS', job) == 0 then return 0 end
if fields[1] == 'canceled' and call('ZSCORE', 'rq:canceled:' .. queue, id) then return 0 end
-- Who takes it from there has its turn: its status may be that of a copy that somebody saved.
if call('ZREM', 'rq:deferred:' .. queue, id) == 0 then return 0 end
call('SADD', 'rq:queues', 'rq:queue:' .. queue)
local key, concurrency = fields[3], fields[4]
if key and concurrency then
  call('SADD', 'rq:rl-keys', key)
  call('HSET', 'rq:rl:' .. key, 'concurrency', concurrency)
  call('HSET', job, 'status', 'rate_limited', 'enqueue_at_front', ARGV[5])
  expire_in_queue(job, fields[2])
  call('ZADD', 'rq:rl:' .. key .. ':rate_limited', ARGV[6], id)
  let_in(key, ARGV[4])
  return 1
end
call('HSET', job, 'status', 'queued', 'enqueued_at', ARGV[4])
expire_in_queue(job, fields[2])
call(ARGV[5] == '1' and 'LPUSH' or 'RPUSH', 'rq:queue:' .. queue, id)
return 1
